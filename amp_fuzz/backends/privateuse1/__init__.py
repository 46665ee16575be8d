"""A complete device of PyTorch's, in Python: a template for vendors, and a device to test with.

``privateuse1.install()`` makes a device of the dispatch key that PyTorch keeps for out-of-tree
devices, PrivateUse1. Its memory and kernels are the CPU's; its autocast follows any policy table,
so that the policy of CUDA runs, forward and backward, on a machine without a GPU.

    device = amp_fuzz.backends.privateuse1.install("cuda")
    x = torch.randn(2, 2, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16

Its module `tensor` holds memory and kernels, `autocast` the policies, and `module` what torch asks
of a device; docs/privateuse1.md is the guide.
"""

from amp_fuzz.backends.privateuse1.autocast import Autocast, WeightCache
from amp_fuzz.backends.privateuse1.module import (
    DEVICE,
    DeviceError,
    DeviceModule,
    install,
    supported,
)
from amp_fuzz.backends.privateuse1.tensor import DeviceTensor, placed

__all__ = [
    "DEVICE",
    "Autocast",
    "DeviceError",
    "DeviceModule",
    "DeviceTensor",
    "WeightCache",
    "install",
    "placed",
    "supported",
]
