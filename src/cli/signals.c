/* SPDX-License-Identifier: Apache-2.0 */
/* The handlers use only async-signal-safe calls: write, _exit, pause, and the two functions of the
 * library that are documented as such. */
#include "cli/signals.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"

static const char *watched_model_name;
static _Atomic(const struct imbrex_model *) watched_model;
static _Atomic(struct imbrex_generation *) watched_generation;
static atomic_int interrupt_signal;
static atomic_flag bus_error_reported = ATOMIC_FLAG_INIT;
/* The kernel stores all vector registers here; AMX state alone is 8 KiB. */
static unsigned char bus_error_stack[32768];

static void write_error_text(const char *text)
{
    ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written;
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
    write_error_text("imbrex: error: ");
    write_error_text(file != NULL ? file : watched_model_name);
    write_error_text(file != NULL ? ": the file changed" : ": a file of the model changed");
    write_error_text(" while it was mapped (truncated, or its disk failed)\n");
    _exit(EXIT_CODE_INPUT);
}

static void interrupt_handler(int signal_number)
{
    struct imbrex_generation *generation = atomic_load(&watched_generation);

    if (generation == NULL || atomic_exchange(&interrupt_signal, signal_number) != 0) {
        _exit(EXIT_CODE_SIGNAL + signal_number);
    }
    imbrex_generation_cancel(generation);
}

void signals_install(const char *model_name)
{
    stack_t stack = {.ss_sp = bus_error_stack, .ss_size = sizeof(bus_error_stack)};
    struct sigaction bus_error = {.sa_sigaction = bus_error_handler,
                                  .sa_flags = SA_SIGINFO | SA_ONSTACK};
    struct sigaction ignore = {.sa_handler = SIG_IGN};

    watched_model_name = model_name;
    sigemptyset(&bus_error.sa_mask);
    sigemptyset(&ignore.sa_mask);
    /* These cannot fail: the arguments are constants that POSIX allows. */
    sigaltstack(&stack, NULL);
    sigaction(SIGBUS, &bus_error, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
}

void signals_set_model(const struct imbrex_model *model)
{
    atomic_store(&watched_model, model);
}

void signals_watch_interrupts(void)
{
    struct sigaction interrupt = {.sa_handler = interrupt_handler, .sa_flags = SA_RESTART};

    sigemptyset(&interrupt.sa_mask);
    sigaction(SIGINT, &interrupt, NULL);
    sigaction(SIGTERM, &interrupt, NULL);
}

static void mask_interrupts(int how)
{
    sigset_t interrupts;

    sigemptyset(&interrupts);
    sigaddset(&interrupts, SIGINT);
    sigaddset(&interrupts, SIGTERM);
    sigprocmask(how, &interrupts, NULL);
}

void signals_hold_interrupts(void)
{
    mask_interrupts(SIG_BLOCK);
}

void signals_release_interrupts(void)
{
    mask_interrupts(SIG_UNBLOCK);
}

void signals_set_generation(struct imbrex_generation *generation)
{
    atomic_store(&watched_generation, generation);
}

int signals_interrupt(void)
{
    return atomic_load(&interrupt_signal);
}
