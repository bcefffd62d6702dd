/* SPDX-License-Identifier: Apache-2.0 */
/* The handlers use only async-signal-safe calls: write, _exit, pause, and the two functions of the
 * library that are documented as such. */
#include "cli/signals.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"

static _Atomic(const struct imbrex_model *) watched_model;
static _Atomic(struct imbrex_request *) watched_request;
static atomic_int interrupt_signal;
static atomic_bool notes_interrupts;
static atomic_flag bus_error_reported = ATOMIC_FLAG_INIT;
/* The kernel stores all vector registers here; AMX state alone is 8 KiB. */
static unsigned char bus_error_stack[32768];

static void write_error_text(const char *text)
{
    ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written;
}

/* With '?' for control characters, as all messages. */
static void write_escaped_text(const char *text)
{
    char buffer[256];

    while (*text != '\0') {
        size_t length = 0;
        for (; *text != '\0' && length < sizeof(buffer) - 1; text++) {
            bool is_control = (unsigned char)*text < 0x20 || *text == 0x7f;
            buffer[length++] = is_control ? '?' : *text;
        }
        buffer[length] = '\0';
        write_error_text(buffer);
    }
}

static void bus_error_handler(int signal_number, siginfo_t *details, void *context)
{
    (void)context;
    /* Codes from the kernel are positive and come with an address. Others were sent by a process,
     * which gets what it asked for as soon as the handler returns and the signal is unblocked. */
    if (details->si_code <= 0) {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
        return;
    }
    /* Several compute threads may hit the hole at once: one reports and ends the process. */
    if (atomic_flag_test_and_set(&bus_error_reported)) {
        for (;;) {
            pause();
        }
    }
    const struct imbrex_model *model = atomic_load(&watched_model);
    const char *file = NULL;
    if (model != NULL) {
        file = imbrex_model_file_at(model, details->si_addr);
    }
    if (file == NULL) {
        write_error_text("imbrex: error: bus error: memory could not be read (a mapped file was "
                         "truncated, or a disk or memory failed)\n");
        _exit(EXIT_CODE_FAILURE);
    }
    write_error_text("imbrex: error: ");
    write_escaped_text(file);
    write_error_text(": the file changed while it was mapped (truncated, or its disk failed)\n");
    _exit(EXIT_CODE_INPUT);
}

static void interrupt_handler(int signal_number)
{
    struct imbrex_request *request = atomic_load(&watched_request);

    if ((request == NULL && !atomic_load(&notes_interrupts)) ||
        atomic_exchange(&interrupt_signal, signal_number) != 0) {
        _exit(EXIT_CODE_SIGNAL + signal_number);
    }
    if (request != NULL) {
        imbrex_request_cancel(request);
    }
}

void signals_install(void)
{
    stack_t stack = {.ss_sp = bus_error_stack, .ss_size = sizeof(bus_error_stack)};
    struct sigaction bus_error = {.sa_sigaction = bus_error_handler,
                                  .sa_flags = SA_SIGINFO | SA_ONSTACK};
    struct sigaction ignore = {.sa_handler = SIG_IGN};

    sigemptyset(&bus_error.sa_mask);
    sigemptyset(&ignore.sa_mask);
    /* These cannot fail: the arguments are constants that POSIX allows. */
    sigaltstack(&stack, NULL);
    sigaction(SIGBUS, &bus_error, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
    sigaction(SIGXFSZ, &ignore, NULL);
}

void signals_set_model(const struct imbrex_model *model)
{
    atomic_store(&watched_model, model);
}

/* nohup and shells without job control start programs with signals ignored: on purpose. */
static void watch_unless_ignored(int signal_number)
{
    struct sigaction interrupt = {.sa_handler = interrupt_handler, .sa_flags = SA_RESTART};
    struct sigaction inherited;

    sigemptyset(&interrupt.sa_mask);
    if (sigaction(signal_number, NULL, &inherited) == 0 && inherited.sa_handler != SIG_IGN) {
        sigaction(signal_number, &interrupt, NULL);
    }
}

void signals_watch_interrupts(void)
{
    watch_unless_ignored(SIGINT);
    watch_unless_ignored(SIGTERM);
    watch_unless_ignored(SIGHUP);
}

static void mask_interrupts(int how)
{
    sigset_t interrupts;

    sigemptyset(&interrupts);
    sigaddset(&interrupts, SIGINT);
    sigaddset(&interrupts, SIGTERM);
    sigaddset(&interrupts, SIGHUP);
    pthread_sigmask(how, &interrupts, NULL);
}

void signals_hold_interrupts(void)
{
    mask_interrupts(SIG_BLOCK);
}

void signals_release_interrupts(void)
{
    mask_interrupts(SIG_UNBLOCK);
}

void signals_set_request(struct imbrex_request *request)
{
    atomic_store(&watched_request, request);
}

void signals_note_interrupts(bool is_on)
{
    atomic_store(&notes_interrupts, is_on);
}

int signals_interrupt(void)
{
    return atomic_load(&interrupt_signal);
}

int signals_take_interrupt(void)
{
    return atomic_exchange(&interrupt_signal, 0);
}

bool signals_wait_for_input(int fd)
{
    struct pollfd input = {.fd = fd, .events = POLLIN};
    sigset_t unheld;

    pthread_sigmask(SIG_BLOCK, NULL, &unheld);
    sigdelset(&unheld, SIGINT);
    sigdelset(&unheld, SIGTERM);
    sigdelset(&unheld, SIGHUP);
    while (signals_interrupt() == 0) {
        /* Unblocking and waiting are one step: no signal slips in between. What poll cannot wait
         * for, read will tell. */
        if (ppoll(&input, 1, NULL, &unheld) >= 0 || errno != EINTR) {
            return signals_interrupt() == 0;
        }
    }
    return false;
}
