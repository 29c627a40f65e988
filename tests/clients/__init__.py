"""Libraries that use ours, or that do the same by another way: each is run, compared, and a row of the site's table.

`python -m pip install -e ".[clients]"` brings what installs beside torch's CPU build by itself. Laplace and curvlinops
ask for torchvision, whose build on PyPI does not load there; they need nothing of it here:

    python -m pip install --no-deps laplace-torch asdfghjkl==0.1a4 torchmetrics lightning-utilities \\
        curvlinops-for-pytorch backpack-for-pytorch unfoldNd einops einconv linear_operator
"""
