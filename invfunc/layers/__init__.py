"""Layers as pairs of pure functions: each call makes an `Invertible`, whose parameters are an argument behind x.

Of `float16` and `bfloat16` the inverses and the log-determinants are computed in float32, and the log-determinants stay
float32. Autocast changes nothing: what it rounds off, no inverse gives back.
"""

from invfunc.layers.actnorm import actnorm
from invfunc.layers.batch_norm import batch_norm
from invfunc.layers.conv1x1 import conv1x1
from invfunc.layers.flatten import flatten
from invfunc.layers.haar import haar
from invfunc.layers.identity import identity
from invfunc.layers.leaky_relu import leaky_relu
from invfunc.layers.linear import linear
from invfunc.layers.orthogonal_linear import orthogonal_linear
from invfunc.layers.pad import pad
from invfunc.layers.patch_conv import patch_conv
from invfunc.layers.pixel_shuffle import pixel_shuffle, pixel_unshuffle
from invfunc.layers.unflatten import unflatten

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
