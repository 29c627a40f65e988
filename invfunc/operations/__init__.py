"""What is known of torch's operations.

`batch_axis`: where they move the samples; `factors`: how the gradient of a parameter factorises, sample by sample;
`receptive_fields`: which entries they read for which; `equations`: what is an einsum; `compositions`: what is made of
others; `second_derivatives`: where torch's are missing or wrong; `calls`: names, and which are selections or affine.
"""
