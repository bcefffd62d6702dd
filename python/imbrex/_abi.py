# SPDX-License-Identifier: Apache-2.0
"""The structs of imbrex.h and imbrex_ops.h that Python fills or reads, field for field.

tests/test_abi.py compares each with what a C compiler makes of the headers: a field that is
missing, in the wrong place or of another size fails there.
"""
from __future__ import annotations

import ctypes
from ctypes import (POINTER, c_bool, c_char, c_char_p, c_double, c_float, c_int32, c_int64,
                    c_size_t, c_uint32, c_uint64, c_void_p)
from typing import Any

c_enum = c_int32  # gcc and clang give every enum of these headers four bytes
ERROR_MESSAGE_BYTES = 512
NO_TOKENS = -1
CPU_ALL = 0xFFFF

TOKENIZE_ADD_SPECIAL = 1
TOKENIZE_PARSE_SPECIAL = 2

DTYPE_F32 = 0
DTYPE_BF16 = 1

OP_GEMM_SWIGLU = 0
OP_GEMM = 1
ANY_VARIANT = -1

# In the order of enum imbrex_activation and enum imbrex_rounding.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ROUNDINGS = ("exact", "match_unfused")

LogFunction = ctypes.CFUNCTYPE(None, c_void_p, c_enum, c_char_p)


class Error(ctypes.Structure):
    c_name = "imbrex_error"
    _fields_ = [("status", c_enum), ("field", c_char_p),
                ("message", c_char * ERROR_MESSAGE_BYTES)]


class ModelOptions(ctypes.Structure):
    c_name = "imbrex_model_options"
    _fields_ = [("log", LogFunction), ("log_user", c_void_p)]


class ModelInfo(ctypes.Structure):
    c_name = "imbrex_model_info"
    _fields_ = [
        ("path", c_char_p), ("format", c_char_p), ("file_type", c_char_p),
        ("architecture", c_char_p), ("hidden_size", c_int32), ("intermediate_size", c_int32),
        ("num_layers", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32),
        ("head_dim", c_int32), ("vocab_size", c_int32), ("max_position_embeddings", c_int32),
        ("rope_theta", c_double), ("rms_norm_eps", c_double), ("rope_scaling", c_char_p),
        ("rope_scaling_factor", c_double), ("sliding_window", c_int32),
        ("num_sliding_layers", c_int32), ("tied", c_bool), ("tied_reason", c_char_p),
        ("num_parameters", c_int64), ("weight_bytes", c_size_t),
        ("kv_bytes_per_token", c_size_t), ("eos_token_ids", POINTER(c_int32)),
        ("num_eos_token_ids", c_int32),
    ]


class ChatOptions(ctypes.Structure):
    c_name = "imbrex_chat_options"
    _fields_ = [
        ("tools_json", c_char_p), ("chat_template", c_char_p), ("chat_template_name", c_char_p),
        ("add_generation_prompt", c_bool), ("now", c_int64),
    ]


class EngineOptions(ctypes.Structure):
    c_name = "imbrex_engine_options"
    _fields_ = [
        ("num_threads", c_int32), ("context_size", c_int32), ("kv_cache_tokens", c_int32),
        ("max_running", c_int32), ("max_step_tokens", c_int32), ("max_waiting", c_int32),
        ("priority_step_ns", c_int64), ("batch_invariant", c_enum), ("kv_policy", c_char_p),
        ("kv_host_bytes", c_size_t), ("kv_disk_path", c_char_p), ("kv_disk_bytes", c_size_t),
        ("kv_disk_zstd_level", c_int32), ("kv_prefetch_percent", c_int32),
        ("kv_remote_url", c_char_p), ("kv_remote_secret_path", c_char_p), ("kv_write", c_enum),
        ("cpu_features", c_uint32), ("device", c_char_p), ("compute", c_enum), ("kv_dtype", c_enum),
        ("tuned", c_char_p), ("tuned_is_optional", c_bool), ("ablations", c_uint32),
        ("load_progress", c_void_p), ("load_user", c_void_p),
        ("range_begin", c_void_p), ("range_end", c_void_p), ("range_user", c_void_p),
    ]


class MemoryPlan(ctypes.Structure):
    c_name = "imbrex_memory_plan"
    _fields_ = [
        ("weight_bytes", c_size_t), ("converted_bytes", c_size_t),
        ("device_weight_bytes", c_size_t), ("kv_bytes", c_size_t),
        ("activation_bytes", c_size_t), ("batch_bytes", c_size_t), ("kv_host_bytes", c_size_t),
        ("kv_disk_bytes", c_size_t), ("kv_block_size", c_int32),
        ("kv_num_blocks", c_int32), ("context_size", c_int32), ("max_step_tokens", c_int32),
        ("max_running", c_int32), ("max_waiting", c_int32), ("num_threads", c_int32),
        ("kernels", c_char_p), ("device", c_char_p), ("device_idx", c_int32),
        ("compute", c_char_p), ("kv_dtype", c_char_p), ("kv_token_bytes", c_size_t),
    ]


class Logprob(ctypes.Structure):
    c_name = "imbrex_logprob"
    _fields_ = [("token_id", c_int32), ("logprob", c_float)]


class LogitBias(ctypes.Structure):
    c_name = "imbrex_logit_bias"
    _fields_ = [("token_id", c_int32), ("bias", c_float)]


class TokenEvent(ctypes.Structure):
    c_name = "imbrex_token_event"
    _fields_ = [
        ("choice_idx", c_int32), ("token_id", c_int32), ("text", c_void_p),
        ("text_bytes", c_size_t), ("finish_reason", c_enum), ("is_last", c_bool),
        ("logprob", c_float), ("top_logprobs", POINTER(Logprob)), ("num_top_logprobs", c_int32),
    ]


class RequestOptions(ctypes.Structure):
    c_name = "imbrex_request_options"
    _fields_ = [
        ("prompt_ids", POINTER(c_int32)), ("num_prompt_ids", c_int32), ("prompt_text", c_char_p),
        ("prompt_text_bytes", c_size_t), ("prompt_text_flags", c_uint32),
        ("max_tokens", c_int32), ("min_tokens", c_int32), ("num_choices", c_int32),
        ("temperature", c_float), ("top_k", c_int32), ("top_p", c_float), ("min_p", c_float),
        ("repetition_penalty", c_float), ("frequency_penalty", c_float),
        ("presence_penalty", c_float), ("logit_bias", POINTER(LogitBias)),
        ("num_logit_bias", c_size_t), ("seed", c_uint64), ("stop", POINTER(c_char_p)),
        ("num_stop", c_size_t), ("end_token_ids", POINTER(c_int32)),
        ("num_end_token_ids", c_size_t), ("ignore_eos", c_bool), ("num_logprobs", c_int32),
        ("num_prompt_logprobs", c_int32), ("priority", c_int32), ("timeout_ns", c_int64),
        ("salt", c_char_p), ("salt_bytes", c_size_t), ("session", c_uint64), ("turn", c_int32),
        ("tenant", c_uint32), ("expected_return_ns", c_int64), ("is_session_end", c_bool),
        ("no_text", c_bool), ("callback", c_void_p), ("user", c_void_p),
        ("from_checkpoint", c_uint32),
    ]


class RequestMetrics(ctypes.Structure):
    c_name = "imbrex_request_metrics"
    _fields_ = [
        ("num_prompt_tokens", c_int32), ("num_generated_tokens", c_int32),
        ("num_cached_tokens", c_int32), ("num_host_tokens", c_int32),
        ("num_disk_tokens", c_int32), ("num_remote_tokens", c_int32),
        ("num_preemptions", c_int32), ("queue_ns", c_int64),
        ("prefill_ns", c_int64), ("decode_ns", c_int64), ("ttft_ns", c_int64),
        ("finish_reason", c_enum),
    ]


class DeviceOptions(ctypes.Structure):
    c_name = "imbrex_device_options"
    _fields_ = [
        ("max_tensor_maps", c_int32), ("overlap_launches", c_bool), ("portable_kernels", c_bool),
        ("tuned", c_char_p), ("tuned_is_optional", c_bool), ("log", LogFunction),
        ("log_user", c_void_p),
    ]


class DeviceInfo(ctypes.Structure):
    c_name = "imbrex_device_info"
    _fields_ = [
        ("name", c_char * 128), ("device_idx", c_int32), ("compute_capability", c_int32),
        ("num_sms", c_int32), ("driver_version", c_int32), ("l2_bytes", c_int64),
        ("kernel_image_bytes", c_int64), ("kernel_load_ns", c_int64), ("tuned", c_char_p),
        ("num_tuned", c_int32),
    ]


class Gating(ctypes.Structure):
    c_name = "imbrex_gating"
    _fields_ = [("activation", c_enum), ("alpha", c_float), ("limit", c_float),
                ("up_offset", c_float)]


class GemmSwigluParams(ctypes.Structure):
    c_name = "imbrex_gemm_swiglu_params"
    _fields_ = [
        ("a", c_void_p), ("gate", c_void_p), ("up", c_void_p), ("d", c_void_p),
        ("a_stride", c_int64), ("gate_stride", c_int64), ("up_stride", c_int64),
        ("d_stride", c_int64), ("num_tokens", c_int32), ("hidden_size", c_int32),
        ("intermediate_size", c_int32), ("weights_settled", c_bool),
        ("interleave_rows", c_int32), ("gate_bias", c_void_p), ("up_bias", c_void_p),
        ("interleave_biases", c_int32), ("rounding", c_enum), ("gating", Gating),
    ]


class GemmParams(ctypes.Structure):
    c_name = "imbrex_gemm_params"
    _fields_ = [
        ("a", c_void_p), ("b", c_void_p), ("bias", c_void_p), ("d", c_void_p),
        ("a_stride", c_int64), ("b_stride", c_int64), ("d_stride", c_int64),
        ("num_tokens", c_int32), ("in_features", c_int32), ("out_features", c_int32),
        ("weights_settled", c_bool),
    ]


class KernelVariant(ctypes.Structure):
    c_name = "imbrex_kernel_variant"
    _fields_ = [
        ("name", c_char_p), ("schedule", c_char_p), ("is_split", c_bool),
        ("is_general", c_bool), ("block_m", c_int32), ("block_n", c_int32),
        ("num_stages", c_int32), ("shared_bytes", c_int32), ("is_portable", c_bool),
    ]


class KernelShape(ctypes.Structure):
    c_name = "imbrex_kernel_shape"
    _fields_ = [("op", c_enum), ("m", c_int32), ("n", c_int32), ("k", c_int32),
                ("is_split", c_bool), ("is_general", c_bool)]


class KernelPlan(ctypes.Structure):
    c_name = "imbrex_kernel_plan"
    _fields_ = [
        ("variant_idx", c_int32), ("cluster_m", c_int32), ("cluster_n", c_int32),
        ("group_m", c_int32), ("num_tiles_n", c_int32), ("num_waves", c_int32),
        ("expected_us", c_double),
    ]


class CpuGemmSwigluParams(ctypes.Structure):
    c_name = "imbrex_cpu_gemm_swiglu_params"
    _fields_ = [
        ("a", c_void_p), ("gate", c_void_p), ("up", c_void_p), ("gate_bias", c_void_p),
        ("up_bias", c_void_p), ("d", c_void_p), ("a_stride", c_int64), ("d_stride", c_int64),
        ("num_tokens", c_int32), ("hidden_size", c_int32), ("intermediate_size", c_int32),
        ("dtype", c_int32), ("weight_dtype", c_int32),
    ]


class CpuGemmParams(ctypes.Structure):
    c_name = "imbrex_cpu_gemm_params"
    _fields_ = [
        ("a", c_void_p), ("b", c_void_p), ("bias", c_void_p), ("d", c_void_p),
        ("a_stride", c_int64), ("d_stride", c_int64), ("num_tokens", c_int32),
        ("in_features", c_int32), ("out_features", c_int32), ("dtype", c_int32),
        ("weight_dtype", c_int32),
    ]


def field_names(struct: type[ctypes.Structure]) -> list[str]:
    return [field[0] for field in struct._fields_]


def values(struct: ctypes.Structure) -> dict[str, Any]:
    """Fields by their names; strings decoded."""
    found = ((name, getattr(struct, name)) for name in field_names(type(struct)))
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found}


STRUCTS = [value for value in list(vars().values())
           if isinstance(value, type) and issubclass(value, ctypes.Structure)]

_err = POINTER(Error)
_ids = POINTER(c_int32)

# name: (result, arguments). A result of c_enum is a status.
FUNCTIONS = {
    "imbrex_version": (c_char_p, []),
    "imbrex_status_name": (c_char_p, [c_enum]),
    "imbrex_finish_reason_name": (c_char_p, [c_enum]),
    "imbrex_free": (None, [c_void_p]),
    "imbrex_model_options_default": (ModelOptions, []),
    "imbrex_model_open": (c_enum, [c_char_p, POINTER(ModelOptions), POINTER(c_void_p), _err]),
    "imbrex_model_close": (None, [c_void_p]),
    "imbrex_model_tokenizer": (c_void_p, [c_void_p]),
    "imbrex_model_describe": (None, [c_void_p, POINTER(ModelInfo)]),
    "imbrex_tokenizer_vocab_size": (c_int32, [c_void_p]),
    "imbrex_tokenize": (c_enum, [c_void_p, c_char_p, c_size_t, c_uint32, POINTER(_ids),
                                 POINTER(c_size_t), _err]),
    "imbrex_detokenize": (c_enum, [c_void_p, _ids, c_size_t, c_bool, POINTER(c_void_p),
                                   POINTER(c_size_t), _err]),
    "imbrex_chat_options_default": (ChatOptions, []),
    "imbrex_chat_tokenize": (c_enum, [c_void_p, c_char_p, POINTER(ChatOptions), POINTER(_ids),
                                      POINTER(c_size_t), POINTER(c_void_p), POINTER(c_size_t),
                                      _err]),
    "imbrex_chat_end_token": (c_enum, [c_void_p, POINTER(ChatOptions), _ids, _err]),
    "imbrex_engine_options_default": (EngineOptions, []),
    "imbrex_engine_create": (c_enum, [c_void_p, POINTER(EngineOptions), POINTER(c_void_p),
                                      _err]),
    "imbrex_engine_destroy": (None, [c_void_p]),
    "imbrex_engine_memory_plan": (None, [c_void_p, POINTER(MemoryPlan)]),
    "imbrex_engine_score": (c_enum, [c_void_p, _ids, c_int32, POINTER(c_double), _err]),
    "imbrex_request_options_default": (RequestOptions, [c_void_p]),
    "imbrex_request_submit": (c_enum, [c_void_p, POINTER(RequestOptions), POINTER(c_void_p),
                                       _err]),
    "imbrex_request_destroy": (None, [c_void_p]),
    "imbrex_request_cancel": (None, [c_void_p]),
    "imbrex_request_poll": (c_enum, [c_void_p, c_int64, POINTER(c_bool), POINTER(TokenEvent),
                                     _err]),
    "imbrex_request_read_metrics": (None, [c_void_p, POINTER(RequestMetrics)]),
    "imbrex_device_options_default": (DeviceOptions, []),
    "imbrex_device_open": (c_enum, [c_int32, POINTER(DeviceOptions), POINTER(c_void_p), _err]),
    "imbrex_device_close": (None, [c_void_p]),
    "imbrex_device_describe": (None, [c_void_p, POINTER(DeviceInfo)]),
    "imbrex_gemm_swiglu": (c_enum, [c_void_p, POINTER(GemmSwigluParams), POINTER(KernelPlan),
                                    c_void_p, _err]),
    "imbrex_gemm": (c_enum, [c_void_p, POINTER(GemmParams), POINTER(KernelPlan), c_void_p, _err]),
    "imbrex_kernel_num_variants": (c_int32, [c_enum]),
    "imbrex_kernel_variant_describe": (c_enum, [c_enum, c_int32, POINTER(KernelVariant), _err]),
    "imbrex_kernel_choose": (c_enum, [c_void_p, POINTER(KernelShape), c_int32,
                                      POINTER(KernelPlan), _err]),
    "imbrex_cpu_open": (c_enum, [c_int32, POINTER(c_void_p), _err]),
    "imbrex_cpu_close": (None, [c_void_p]),
    "imbrex_cpu_gemm_swiglu": (c_enum, [c_void_p, POINTER(CpuGemmSwigluParams), _err]),
    "imbrex_cpu_gemm": (c_enum, [c_void_p, POINTER(CpuGemmParams), _err]),
}
