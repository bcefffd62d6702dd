# SPDX-License-Identifier: Apache-2.0
"""Models and engines: text and token ids in, text and token ids out.

Threads: a Model and an Engine may be used by any number of threads at once. A Generation is
iterated by one thread; `cancel` and `close` may come from any. The engine computes on the threads
that wait for its tokens, one at a time, without Python's lock: while one thread waits, all requests
of the engine move on.
"""
from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import logging
import operator
import os
import threading
import time
from ctypes import byref, c_bool, c_char_p, c_double, c_int32, c_size_t, c_void_p
from types import TracebackType
from typing import Any, Iterable, Iterator, Mapping, NoReturn, Optional, Sequence, Union

from . import _abi
from ._library import check, library
from .errors import Error, Status

__all__ = ["BUILTIN", "Choice", "Engine", "Generation", "Model", "ModelInfo", "Result",
           "Sampling", "Token"]

BUILTIN = "builtin:stories260K"
Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
_log = logging.getLogger("imbrex")
_LOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING)
_INVARIANCE = {False: 0, True: 1, None: 2}
_COMPUTE = {"auto": 0, "f32": 1, "bf16": 2}
_KV_WRITE = {"computed": 0, "demoted": 1}
_KV_DTYPE = {"auto": 0, "fp32": 1, "fp16": 2, "bf16": 3, "int8": 4, "fp8": 5}
# How long a thread is inside the library before Python may handle a signal such as Ctrl-C.
_POLL_NS = 50_000_000


@_abi.LogFunction
def _forward_log(_user: Any, level: int, message: bytes) -> None:
    _log.log(_LOG_LEVELS[level], "%s", message.decode("utf-8", "replace"))


def _refuse(name: str, expected: str, found: Any) -> NoReturn:
    text = repr(found)
    shown = text if len(text) <= 80 else text[:77] + "..."
    raise Error(Status.INVALID_ARGUMENT, f"{name}: expected {expected}, found {shown}")


def _number(value: Any) -> float:
    """float(), which would read a text as well."""
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError
    return float(value)


def _int_array(values: Sequence[int], name: str) -> Any:
    """A C array, of length 1 at least, so that it has an address."""
    if isinstance(values, (str, bytes, bytearray, Mapping)):
        _refuse(name, "integers", values)
    try:
        numbers = [operator.index(value) for value in values]
    except TypeError as error:
        raise Error(Status.INVALID_ARGUMENT, f"{name}: expected integers: {error}") from None
    for number in numbers:
        if not -2**31 <= number < 2**31:
            _refuse(name, "32-bit integers", number)
    return (c_int32 * max(len(numbers), 1))(*numbers)


def _text_bytes(text: str, name: str) -> bytes:
    if not isinstance(text, str):
        _refuse(name, "a text", text)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Error(Status.INVALID_ARGUMENT, f"{name}: {error}") from None


def _c_text(text: Optional[str], name: str) -> Optional[bytes]:
    """For parameters that end at a NUL."""
    if text is None:
        return None
    encoded = _text_bytes(text, name)
    if b"\0" in encoded:
        raise Error(Status.INVALID_ARGUMENT, f"{name}: expected no NUL, found one")
    return encoded


def _c_path(path: Optional[Path], name: str) -> Optional[bytes]:
    if path is None:
        return None
    try:
        encoded = os.fsencode(path)
    except (TypeError, UnicodeEncodeError):
        _refuse(name, "a path", path)
    if b"\0" in encoded:
        raise Error(Status.INVALID_ARGUMENT, f"{name}: expected no NUL, found one")
    return encoded


def _optional_text(value: Optional[bytes]) -> Optional[str]:
    return None if value is None else value.decode("utf-8", "replace")


def _range_of(number_type: Any) -> str:
    """What a field of this integer type can hold, as a text."""
    num_bits = 8 * ctypes.sizeof(number_type)
    is_signed = number_type(-1).value < 0
    least = -(1 << (num_bits - 1)) if is_signed else 0
    return f"{least} to {least + (1 << num_bits) - 1}"


def _set_fields(struct: ctypes.Structure, values: Mapping[str, Any]) -> None:
    """Sets numbers; one that does not fit its field is refused instead of cut."""
    types = {field[0]: field[1] for field in struct._fields_}
    for name, value in values.items():
        if value is None:
            continue
        if types[name] is c_bool:
            if not isinstance(value, bool):
                _refuse(name, "True or False", value)
            setattr(struct, name, value)
        elif types[name] is ctypes.c_float:
            try:
                setattr(struct, name, _number(value))
            except (TypeError, ValueError, OverflowError):
                _refuse(name, "a number", value)
        else:
            try:
                number = operator.index(value)
            except TypeError:
                _refuse(name, "an integer", value)
            setattr(struct, name, number)
            if getattr(struct, name) != number:
                _refuse(name, _range_of(types[name]), number)


# ---- ownership --------------------------------------------------------------------------------
#
# The library wants requests destroyed before their engine, and engines before their model. Python
# promises no order when it finalizes objects that refer to each other, at its end least of all. So
# these handles keep the order among themselves, whichever is finalized first. They use no global
# names there, which may be gone by then, and locks that the collector may enter again.


class _Uncopyable:
    """What stands for one thing in the library, which a second object would free again."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} objects cannot be copied or pickled")


class _ModelHandle:
    """A struct imbrex_model, closed when the last of its users has released it."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.pointer = c_void_p()
        self._users: set[int] = set()
        self._lock = threading.RLock()

    def acquire(self, user: object) -> None:
        with self._lock:
            self._users.add(id(user))

    def release(self, user: object) -> None:
        """Any number of times."""
        with self._lock:
            self._users.discard(id(user))
            if not self._users:
                address, self.pointer.value = self.pointer.value, None
                self.lib.imbrex_model_close(address)


class _RequestHandle:
    """A struct imbrex_request, or none any more."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.pointer = c_void_p()
        self.lock = threading.RLock()  # whether there is a request
        self.poll_lock = threading.Lock()  # who is inside imbrex_request_poll

    def cancel(self) -> None:
        with self.lock:
            if self.pointer:
                self.lib.imbrex_request_cancel(self.pointer)

    def destroy(self) -> None:
        self.cancel()
        with self.poll_lock, self.lock:
            # Forgotten first: Ctrl-C during the call is raised as soon as it returns.
            address, self.pointer.value = self.pointer.value, None
            self.lib.imbrex_request_destroy(address)


class _EngineHandle:
    """A struct imbrex_engine and its requests; an Engine and its Generations share it."""

    def __init__(self, model: _ModelHandle) -> None:
        self.lib = model.lib
        self.pointer = c_void_p()
        self._model = model
        self._is_closed = False
        self._requests: set[_RequestHandle] = set()
        self._lock = threading.RLock()
        model.acquire(self)

    def submit(self, request: _RequestHandle, options: _abi.RequestOptions) -> None:
        err = _abi.Error()
        with self._lock:
            if self._is_closed:
                raise Error(Status.INVALID_ARGUMENT, "engine: it is closed")
            self._requests.add(request)
            status = self.lib.imbrex_request_submit(self.pointer, byref(options),
                                                    byref(request.pointer), byref(err))
            if status != Status.OK:
                self._requests.discard(request)
        check(status, err)

    def destroy_request(self, request: _RequestHandle) -> None:
        request.destroy()
        self._requests.discard(request)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        for request in requests:
            self.destroy_request(request)
        with self._lock:
            address, self.pointer.value = self.pointer.value, None
            self.lib.imbrex_engine_destroy(address)
        self._model.release(self)

    def __del__(self) -> None:
        self.close()


# ---- models -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What a checkpoint says about itself; the fields of `struct imbrex_model_info`."""

    path: str
    format: str
    file_type: Optional[str]
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]


class Model(_Uncopyable):
    """An opened checkpoint: configuration, mapped weights, tokenizer. Immutable; engines share it.

    path: a Hugging Face folder, a GGUF file, "builtin:stories260K" (the default, and what None
        means) or "random:<shape>[:<seed>]". Its files must not change while the model is open.
    Raises Error: NOT_FOUND, FORMAT or UNSUPPORTED, with the file and the field.
    """

    def __init__(self, path: Optional[Path] = BUILTIN) -> None:
        self._lib = library()
        options = self._lib.imbrex_model_options_default()
        options.log = _forward_log
        err = _abi.Error()
        opened = _ModelHandle(self._lib)
        encoded = _c_path(BUILTIN if path is None else path, "path")
        check(self._lib.imbrex_model_open(encoded, byref(options), byref(opened.pointer),
                                          byref(err)), err)
        opened.acquire(self)
        self._native = opened

    @property
    def _handle(self) -> c_void_p:
        return self._native.pointer

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            self._native.release(self)

    def describe(self) -> ModelInfo:
        """What the checkpoint says."""
        found = _abi.ModelInfo()
        self._lib.imbrex_model_describe(self._handle, byref(found))
        values: dict[str, Any] = {}
        for field in dataclasses.fields(ModelInfo):
            value = getattr(found, field.name)
            values[field.name] = _optional_text(value) if isinstance(value, bytes) else value
        values["eos_token_ids"] = tuple(found.eos_token_ids[:found.num_eos_token_ids])
        return ModelInfo(**values)

    def _tokenizer(self) -> c_void_p:
        tokenizer = self._lib.imbrex_model_tokenizer(self._handle)
        if not tokenizer:
            raise Error(Status.NOT_FOUND, "tokenizer: the checkpoint has none")
        return c_void_p(tokenizer)

    def _take_ids(self, ids: Any, count: int) -> list[int]:
        try:
            return list(ids[:count])
        finally:
            self._lib.imbrex_free(ids)

    def _take_text(self, text: c_void_p, num_bytes: int) -> str:
        try:
            return ctypes.string_at(text, num_bytes).decode("utf-8")
        finally:
            self._lib.imbrex_free(text)

    def tokenize(self, text: str, *, add_special: bool = True,
                 parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special: apply the tokenizer's post-processor (begin and end tokens).
        parse_special: special tokens written in the text become their ids.
        """
        flags = ((_abi.TOKENIZE_ADD_SPECIAL if add_special else 0) |
                 (_abi.TOKENIZE_PARSE_SPECIAL if parse_special else 0))
        encoded = _text_bytes(text, "text")
        ids = ctypes.POINTER(c_int32)()
        count = c_size_t()
        err = _abi.Error()
        check(self._lib.imbrex_tokenize(self._tokenizer(), encoded, len(encoded), flags,
                                        byref(ids), byref(count), byref(err)), err)
        return self._take_ids(ids, count.value)

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; incomplete characters become U+FFFD."""
        text = c_void_p()
        num_bytes = c_size_t()
        err = _abi.Error()
        check(self._lib.imbrex_detokenize(
            self._tokenizer(), _int_array(token_ids, "token_ids"), len(token_ids), skip_special,
            byref(text), byref(num_bytes), byref(err)), err)
        return self._take_text(text, num_bytes.value)

    def _chat_options(self, tools: Optional[Sequence[Mapping[str, Any]]],
                      template: Optional[str], add_generation_prompt: bool) -> Any:
        options = self._lib.imbrex_chat_options_default()
        options.tools_json = None if tools is None else json.dumps(list(tools)).encode()
        options.chat_template = _c_text(template, "template")
        options.add_generation_prompt = add_generation_prompt
        options.now = int(time.time()) + time.localtime().tm_gmtoff
        return options

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *,
                    tools: Optional[Sequence[Mapping[str, Any]]] = None,
                    template: Optional[str] = None,
                    add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, by a chat template. What messages contain can never become
        a special token.

        messages: with a "role", a "content" and whatever else the template knows.
        template: None: the checkpoint's own; "chatml", "llama3"; or the text of a Jinja template.
        Raises Error: NOT_FOUND without a template, INVALID_ARGUMENT with the template's own words
        if it refuses the conversation.
        """
        options = self._chat_options(tools, template, add_generation_prompt)
        ids = ctypes.POINTER(c_int32)()
        count = c_size_t()
        err = _abi.Error()
        check(self._lib.imbrex_chat_tokenize(
            self._handle, json.dumps(list(messages)).encode(), byref(options), byref(ids),
            byref(count), None, None, byref(err)), err)
        return self._take_ids(ids, count.value)

    def chat_end_token(self, *, tools: Optional[Sequence[Mapping[str, Any]]] = None,
                       template: Optional[str] = None) -> Optional[int]:
        """The token that the template puts behind a reply, or None."""
        options = self._chat_options(tools, template, True)
        token_id = c_int32(-1)
        err = _abi.Error()
        check(self._lib.imbrex_chat_end_token(self._handle, byref(options), byref(token_id),
                                              byref(err)), err)
        return None if token_id.value < 0 else token_id.value


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request continues its prompt. None leaves a field as the checkpoint's
    generation_config.json has it, else greedy and unlimited.

    max_tokens: 0: until an end token or the context is full. timeout: seconds from submit on, more
    than 0, after which it ends with "deadline"; None: no limit. num_logprobs: logprobs of tokens,
    with that many alternatives. stop, end_token_ids, logit_bias and salt are empty if not wanted,
    never None. Ranges and the order in which these act are told at `struct imbrex_request_options`;
    what breaks them, or is of another type, is refused with INVALID_ARGUMENT when it is used.
    """

    max_tokens: Optional[int] = None
    min_tokens: Optional[int] = None
    num_choices: Optional[int] = None
    temperature: Optional[float] = None
    top_k: Optional[int] = None
    top_p: Optional[float] = None
    min_p: Optional[float] = None
    repetition_penalty: Optional[float] = None
    frequency_penalty: Optional[float] = None
    presence_penalty: Optional[float] = None
    seed: Optional[int] = None
    ignore_eos: Optional[bool] = None
    num_logprobs: Optional[int] = None
    priority: Optional[int] = None
    stop: Union[str, Sequence[str]] = ()
    end_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    timeout: Optional[float] = None
    salt: bytes = b""

    def _fill(self, options: _abi.RequestOptions) -> list[Any]:
        """Returns what `options` points to and does not own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            _refuse("stop", "a text or a sequence of texts", stop)
        stops = (c_char_p * max(len(stop), 1))(*[_c_text(text, "stop") for text in stop])
        ends = _int_array(self.end_token_ids, "end_token_ids")
        biases = self._biases()
        if not isinstance(self.salt, bytes):
            _refuse("salt", "bytes", self.salt)
        special = {"stop", "end_token_ids", "logit_bias", "timeout", "salt"}
        _set_fields(options, {field.name: getattr(self, field.name)
                              for field in dataclasses.fields(self) if field.name not in special})
        if options.max_tokens < 0:  # a prompt's logprobs alone, which Python does not hand out
            _refuse("max_tokens", "a number >= 0", self.max_tokens)
        if self.timeout is not None:
            options.timeout_ns = self._timeout_ns()
        options.stop, options.num_stop = stops, len(stop)
        options.end_token_ids, options.num_end_token_ids = ends, len(self.end_token_ids)
        options.logit_bias, options.num_logit_bias = biases, len(self.logit_bias)
        options.salt, options.salt_bytes = self.salt, len(self.salt)
        return [stops, ends, biases, self.salt]

    def _biases(self) -> Any:
        if not isinstance(self.logit_bias, Mapping):
            _refuse("logit_bias", "a mapping of token ids to numbers", self.logit_bias)
        ids = _int_array(list(self.logit_bias), "logit_bias")
        biases = (_abi.LogitBias * max(len(self.logit_bias), 1))()
        for idx, bias in enumerate(self.logit_bias.values()):
            try:
                biases[idx] = _abi.LogitBias(ids[idx], _number(bias))
            except (TypeError, ValueError, OverflowError):
                _refuse("logit_bias", "a mapping of token ids to numbers", bias)
        return biases

    def _timeout_ns(self) -> int:
        """At least one, since 0 is no limit."""
        try:
            nanoseconds = _number(self.timeout) * 1e9
        except (TypeError, ValueError, OverflowError):
            nanoseconds = 0.0
        if not 0.0 < nanoseconds < 2.0**63:
            _refuse("timeout", "seconds, more than 0 and at most 9.2e9, or None for no limit",
                    self.timeout)
        return max(int(nanoseconds), 1)


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token, or the end of a choice: then token_id is None and finish_reason says
    why. `text` is whole characters; the texts of a choice joined are the whole text, whatever token
    they belong to."""

    token_id: Optional[int]
    text: str
    choice: int = 0
    finish_reason: Optional[str] = None
    logprob: Optional[float] = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Choice:
    """One continuation. finish_reason: "eos", "stop_string", "length", "context", "cancelled",
    "error" or "deadline"."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: Optional[list[float]] = None


@dataclasses.dataclass(frozen=True)
class Result:
    """All continuations of one prompt, and what they took.

    num_cached_tokens: of the prompt, found in the prefix cache. num_host_tokens, num_disk_tokens,
    num_remote_tokens: of these, the ones that came up from RAM, the disk or the server since they
    were last used.
    """

    choices: list[Choice]
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_ns: int
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_remote_tokens: int = 0

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return self.choices[0].token_ids


Prompt = Union[str, Sequence[int]]


def _is_full_queue(error: Error) -> bool:
    """Whether a request that was refused may be taken later; a prompt that is too long never is."""
    return error.status == Status.CAPACITY and error.message.startswith("the queue is full")


class Generation(_Uncopyable, Iterator[Token]):
    """A running request: iterate for its tokens. Also a context manager; leaving it, closing it or
    losing the last reference cancels what has not ended.

    Raises Error from iteration if the request fails.
    """

    def __init__(self, engine: Engine, prompt: Prompt, sampling: Sampling) -> None:
        self._lib = engine._lib
        self._engine = engine._native
        self._request = _RequestHandle(self._lib)
        self._num_logprobs = sampling.num_logprobs
        options = self._lib.imbrex_request_options_default(engine.model._handle)
        kept = sampling._fill(options)
        if isinstance(prompt, str):
            text = _text_bytes(prompt, "prompt")
            options.prompt_text, options.prompt_text_bytes = text, len(text)
            options.prompt_text_flags = _abi.TOKENIZE_ADD_SPECIAL
            kept.append(text)
        else:
            if isinstance(prompt, (bytes, bytearray)) or not hasattr(prompt, "__len__"):
                _refuse("prompt", "a text or token ids", prompt)
            ids = _int_array(prompt, "prompt")
            options.prompt_ids, options.num_prompt_ids = ids, len(prompt)
            kept.append(ids)
        self._num_choices = max(options.num_choices, 1)
        self._num_ended = 0
        self._engine.submit(self._request, options)
        del kept

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Token:
        has_event = c_bool(False)
        event = _abi.TokenEvent()
        err = _abi.Error()
        while True:
            with self._request.poll_lock:
                if not self._request.pointer:
                    raise StopIteration
                status = self._lib.imbrex_request_poll(self._request.pointer, _POLL_NS,
                                                       byref(has_event), byref(event), byref(err))
                if status == Status.OK and has_event.value:
                    return self._token(event)
                is_over = status == Status.OK and self._is_over()
            check(status, err)
            if is_over:
                raise StopIteration

    def _is_over(self) -> bool:
        """No event came: whether none will. The library counts a choice's end as its last event."""
        return self._num_ended >= self._num_choices

    def _token(self, event: _abi.TokenEvent) -> Token:
        text = ctypes.string_at(event.text, event.text_bytes) if event.text_bytes else b""
        reason = None
        if event.finish_reason:
            reason = self._lib.imbrex_finish_reason_name(event.finish_reason).decode()
            self._num_ended += 1
        has_logprob = self._num_logprobs is not None and self._num_logprobs >= 0 and not reason
        return Token(
            token_id=None if event.token_id < 0 else event.token_id, text=text.decode("utf-8"),
            choice=event.choice_idx, finish_reason=reason,
            logprob=event.logprob if has_logprob else None,
            top_logprobs=tuple((top.token_id, top.logprob)
                               for top in event.top_logprobs[:event.num_top_logprobs]))

    def cancel(self) -> None:
        """Ends the request before its next step; its end then comes as a Token. Any thread."""
        self._request.cancel()

    def close(self) -> None:
        """Cancels and forgets the request. Iteration ends. Any thread, any number of times."""
        self._engine.destroy_request(self._request)

    def result(self) -> Result:
        """Waits for the end and returns all that was not iterated yet, joined."""
        return self._join(self)

    def _join(self, tokens: Iterable[Token]) -> Result:
        """The result whose last tokens are those that are left."""
        choices: list[dict[str, Any]] = [
            {"text": "", "token_ids": [], "finish_reason": "", "logprobs": []}
            for _ in range(self._num_choices)]
        for token in tokens:
            choice = choices[token.choice]
            choice["text"] += token.text
            if token.token_id is not None:
                choice["token_ids"].append(token.token_id)
                choice["logprobs"].append(token.logprob)
            if token.finish_reason is not None:
                choice["finish_reason"] = token.finish_reason
        metrics = _abi.RequestMetrics()
        with self._request.lock:
            if not self._request.pointer:
                raise Error(Status.INVALID_ARGUMENT, "generation: it is closed")
            self._lib.imbrex_request_read_metrics(self._request.pointer, byref(metrics))
        if self._num_logprobs is None or self._num_logprobs < 0:
            for choice in choices:
                choice["logprobs"] = None
        return Result([Choice(**choice) for choice in choices],
                      num_prompt_tokens=metrics.num_prompt_tokens,
                      num_cached_tokens=metrics.num_cached_tokens, ttft_ns=metrics.ttft_ns,
                      num_host_tokens=metrics.num_host_tokens,
                      num_disk_tokens=metrics.num_disk_tokens,
                      num_remote_tokens=metrics.num_remote_tokens)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_request"):
            self.close()


class Engine(_Uncopyable):
    """A model that runs: threads, KV cache, activations. Many requests share its steps.

    model: a Model, or a path as Model takes it.
    device: "cpu" (the default), "cuda", "cuda:N", or "auto": a GPU if there is one that can.
    num_threads: 0: all CPUs that this process may use.
    context_size: tokens of one sequence; 0: what the model allows, up to 4096.
    kv_cache_tokens: of all sequences together; 0: context_size.
    kv_policy: which KV blocks stay for later requests; None: "lru".
    kv_host_bytes, kv_disk_path, kv_disk_bytes: where blocks go that the cache has no room for: RAM,
        and a folder that a later engine finds again.
    kv_disk_zstd_level: 1 to 19: blocks lie in the folder packed with zstd; 0: as they are.
    kv_prefetch_percent: of the time for copies up, for blocks that the policy expects; 0: none.
    kv_remote_url, kv_remote_secret_path: a Redis or Valkey server for the same, which engines of
        one model may share, and a file of 32 bytes or more that only they have.
    kv_write: when blocks go to the folder and the server: "computed": as soon as they are computed,
        in the background; "demoted": when the cache has no room for them, and at the end.
    tuned: a file or folder of plans that `imbrex tune` measured; refused if the model then runs on
        the CPU.
    batch_invariant: whether a request's bits may not depend on others; None: on on a CPU.
    compute: "auto", "f32" or "bf16" (GPU only).
    kv_dtype: what keys and values are kept in: "auto", "fp32", "fp16", "bf16", "int8" or "fp8".
    Raises Error: INVALID_ARGUMENT for a value that breaks a rule, NOT_FOUND for a policy or a file
        of the secret that is not there, IO for a folder or file that cannot be used, UNSUPPORTED,
        OUT_OF_MEMORY.
    """

    def __init__(self, model: Union[Model, Path, None] = BUILTIN, *, device: str = "cpu",
                 num_threads: int = 0, context_size: int = 0, kv_cache_tokens: int = 0,
                 max_running: int = 0, max_step_tokens: int = 0, max_waiting: int = 0,
                 kv_policy: Optional[str] = None, kv_host_bytes: int = 0,
                 kv_disk_path: Optional[Path] = None, kv_disk_bytes: int = 0,
                 kv_disk_zstd_level: int = 0,
                 kv_prefetch_percent: int = 50,
                 kv_remote_url: Optional[str] = None, kv_remote_secret_path: Optional[Path] = None,
                 kv_write: str = "computed",
                 tuned: Optional[Path] = None, batch_invariant: Optional[bool] = None,
                 compute: str = "auto", kv_dtype: str = "auto") -> None:
        self._lib = library()
        if not isinstance(compute, str) or compute not in _COMPUTE:
            _refuse("compute", "auto, f32 or bf16", compute)
        if not isinstance(kv_dtype, str) or kv_dtype not in _KV_DTYPE:
            _refuse("kv_dtype", "auto, fp32, fp16, bf16, int8 or fp8", kv_dtype)
        if not isinstance(kv_write, str) or kv_write not in _KV_WRITE:
            _refuse("kv_write", "computed or demoted", kv_write)
        if batch_invariant is not None and not isinstance(batch_invariant, bool):
            _refuse("batch_invariant", "True, False or None", batch_invariant)
        self.model = model if isinstance(model, Model) else Model(model)
        self._native = _EngineHandle(self.model._native)
        options = self._lib.imbrex_engine_options_default()
        _set_fields(options, {
            "num_threads": num_threads, "context_size": context_size,
            "kv_cache_tokens": kv_cache_tokens, "max_running": max_running,
            "max_step_tokens": max_step_tokens, "max_waiting": max_waiting,
            "batch_invariant": _INVARIANCE[batch_invariant], "compute": _COMPUTE[compute],
            "kv_dtype": _KV_DTYPE[kv_dtype], "kv_write": _KV_WRITE[kv_write]})
        _set_fields(options, {"kv_host_bytes": kv_host_bytes, "kv_disk_bytes": kv_disk_bytes,
                              "kv_disk_zstd_level": kv_disk_zstd_level,
                              "kv_prefetch_percent": kv_prefetch_percent})
        options.kv_policy = _c_text(kv_policy, "kv_policy")
        options.kv_disk_path = _c_path(kv_disk_path, "kv_disk_path")
        options.kv_remote_url = _c_text(kv_remote_url, "kv_remote_url")
        options.kv_remote_secret_path = _c_path(kv_remote_secret_path, "kv_remote_secret_path")
        options.tuned = _c_path(tuned, "tuned")
        options.device = _c_text(device, "device")
        err = _abi.Error()
        check(self._lib.imbrex_engine_create(self.model._handle, byref(options),
                                             byref(self._native.pointer), byref(err)), err)
        if tuned is not None and self.memory_plan()["device"] == "cpu":
            self.close()
            raise Error(Status.INVALID_ARGUMENT, "tuned: expected a model that runs on a GPU with "
                        "it, found one on the CPU")

    def generate(self, prompt: Prompt, sampling: Optional[Sampling] = None,
                 **changes: Any) -> Generation:
        """Continues a prompt: an iterator over its tokens.

        prompt: a text, or token ids.
        changes: fields of Sampling, over those of `sampling`.
        Raises Error: INVALID_ARGUMENT names the option, CAPACITY if the prompt is too long or too
        many requests wait.
        """
        return Generation(self, prompt, dataclasses.replace(sampling or Sampling(), **changes))

    def generate_batch(self, prompts: Sequence[Prompt], sampling: Optional[Sampling] = None,
                       **changes: Any) -> list[Result]:
        """Continues many prompts together, in the engine's steps, and returns all results in the
        order of the prompts. There may be more of them than max_waiting: the queue is filled as it
        gets empty. If one fails or is refused, all end."""
        if isinstance(prompts, (str, bytes, bytearray)):
            _refuse("prompts", "a sequence of prompts", prompts)
        running: list[Generation] = []
        tokens: list[list[Token]] = []
        first = 0  # of those that may have tokens left
        try:
            for prompt in prompts:
                while True:
                    try:
                        running.append(self.generate(prompt, sampling, **changes))
                        tokens.append([])
                        break
                    except Error as error:
                        if not _is_full_queue(error) or first == len(running):
                            raise
                    # The step that brings the next token takes from the queue what it has room for.
                    token = next(running[first], None)
                    if token is None:
                        first += 1
                    else:
                        tokens[first].append(token)
            return [generation._join(itertools.chain(taken, generation))
                    for generation, taken in zip(running, tokens)]
        finally:
            for generation in running:
                generation.cancel()
            for generation in running:
                generation.close()

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Optional[Sampling] = None, *,
             tools: Optional[Sequence[Mapping[str, Any]]] = None, template: Optional[str] = None,
             **changes: Any) -> Generation:
        """The assistant's next reply to a conversation; see Model.chat_prompt."""
        chosen = dataclasses.replace(sampling or Sampling(), **changes)
        prompt = self.model.chat_prompt(messages, tools=tools, template=template)
        end = self.model.chat_end_token(tools=tools, template=template)
        if end is not None and end not in chosen.end_token_ids:
            chosen = dataclasses.replace(chosen, end_token_ids=[*chosen.end_token_ids, end])
        return Generation(self, prompt, chosen)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Negative log-likelihood of each id but the first, given the ones before it."""
        nll = (c_double * max(len(token_ids) - 1, 1))()
        err = _abi.Error()
        check(self._lib.imbrex_engine_score(self._open_handle(),
                                            _int_array(token_ids, "token_ids"), len(token_ids),
                                            nll, byref(err)), err)
        return nll[:len(token_ids) - 1]

    def memory_plan(self) -> dict[str, Union[int, str]]:
        """What the engine has reserved, in bytes and counts, and the kernels and device in use: the
        fields of `struct imbrex_memory_plan`."""
        plan = _abi.MemoryPlan()
        self._lib.imbrex_engine_memory_plan(self._open_handle(), byref(plan))
        return _abi.values(plan)

    def _open_handle(self) -> c_void_p:
        if not self._native.pointer:
            raise Error(Status.INVALID_ARGUMENT, "engine: it is closed")
        return self._native.pointer

    def close(self) -> None:
        """Ends all requests and frees the engine. No other thread may be in `score` or
        `memory_plan`. Any number of times."""
        self._native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()
