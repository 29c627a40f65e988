"""Layers as pairs of pure functions: each call makes an `Invertible`, whose parameters are an argument behind x.

Of `float16` and `bfloat16` the inverses and the log-determinants are computed in float32, and the log-determinants stay
float32. Autocast changes nothing: what it rounds off, no inverse gives back.
"""

from invfunc.layers.channels import actnorm, batch_norm, conv1x1, leaky_relu, linear, orthogonal_linear, patch_conv
from invfunc.layers.shapes import flatten, haar, identity, pad, pixel_shuffle, pixel_unshuffle, unflatten

__all__ = [
    "actnorm",
    "batch_norm",
    "conv1x1",
    "flatten",
    "haar",
    "identity",
    "leaky_relu",
    "linear",
    "orthogonal_linear",
    "pad",
    "patch_conv",
    "pixel_shuffle",
    "pixel_unshuffle",
    "unflatten",
]
