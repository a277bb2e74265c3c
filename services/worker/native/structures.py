"""The structures of the C interface, field by field as in its headers."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np

# How a row is drawn, and how one is penalised, as in sampling.h.
DRAW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("log_min_p", np.float32),
        ("top_k", np.int32),
        ("key_low", np.uint32),
        ("key_high", np.uint32),
    ]
)
PENALTY = np.dtype(
    [
        ("row", np.int32),
        ("counts_row", np.int32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
    ]
)


class Weight(ctypes.Structure):
    """A packed weight; `scales` is null in float32."""

    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("in_size", c_int32),
        ("out_size", c_int32),
        ("narrow", c_int32),
    )


class Layer(ctypes.Structure):
    """The weights of a dense decoder layer; `q_norm` and `k_norm` are null where it has none."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", Weight),
        ("output", Weight),
        ("gate_up", Weight),
        ("down", Weight),
    )


class Tokens(ctypes.Structure):
    """Of each token of a step: its angles, and where its K and V go."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("pages", c_void_p),
        ("slots", c_void_p),
        ("angle_stride", c_int64),
        ("layer_stride", c_int64),
        ("count", c_int32),
        ("eps", c_float),
    )


class Attention(ctypes.Structure):
    """A batch's rows, and the pools of a layer with their strides in floats."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("page_tables", c_void_p),
        ("starts", c_void_p),
        ("query_lens", c_void_p),
        ("table_stride", c_int64),
        ("page_stride", c_int64),
        ("slot_stride", c_int64),
        ("head_stride", c_int64),
        ("rows", c_int32),
        ("page_size", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("uniform", c_int32),
        ("scale", c_float),
    )
