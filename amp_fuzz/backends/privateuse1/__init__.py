"""A complete PyTorch device in Python: a template for vendors, and a device to test with.

``privateuse1.install()`` registers a device on PrivateUse1, the dispatch key that PyTorch reserves
for out-of-tree devices. Its memory and kernels are the CPU's. Its autocast follows any policy
table, so CUDA's policies run, forward and backward, on a machine without a GPU.

    device = amp_fuzz.backends.privateuse1.install("cuda")
    x = torch.randn(2, 2, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16

The module `tensor` has memory and kernels, `autocast` the policies, and `module` the functions that
torch requires of a device; docs/guide/your-device.md is the guide.
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
