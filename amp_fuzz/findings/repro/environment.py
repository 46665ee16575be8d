"""The essentials of ``torch.utils.collect_env`` for PyTorch's issue form.

That tool also lists conda packages, every CPU flag and every hardware vulnerability. Here these are
left out, and so are paths and names of the user.
"""

from __future__ import annotations

__all__ = ["environment"]

_FIELDS = (
    ("PyTorch version", "torch_version"),
    ("Is debug build", "is_debug_build"),
    ("CUDA used to build PyTorch", "cuda_compiled_version"),
    ("ROCM used to build PyTorch", "hip_compiled_version"),
    ("OS", "os"),
    ("GCC version", "gcc_version"),
    ("Clang version", "clang_version"),
    ("CMake version", "cmake_version"),
    ("Libc version", "libc_version"),
    ("Python version", "python_version"),
    ("Python platform", "python_platform"),
    ("Is CUDA available", "is_cuda_available"),
    ("CUDA runtime version", "cuda_runtime_version"),
    ("GPU models and configuration", "nvidia_gpu_models"),
    ("Nvidia driver version", "nvidia_driver_version"),
    ("cuDNN version", "cudnn_version"),
    ("Is XPU available", "is_xpu_available"),
)


def environment() -> str:
    """Return what torch runs on, one fact per line, as in ``torch.utils.collect_env``."""
    from torch.utils import collect_env

    found = collect_env.get_env_info()
    lines = []
    for words, name in _FIELDS:
        value = getattr(found, name, None)
        if value not in (None, "", "N/A"):
            lines.append(f"{words}: {value}")
    lines.append(f"CPU: {_cpu(found.cpu_info)}")
    packages = [line.strip() for line in (found.pip_packages or "").splitlines() if line.strip()]
    lines += ["", "Versions of relevant libraries:", *(f"[pip3] {p}" for p in packages)]
    return "\n".join(lines)


def _cpu(text: str | None) -> str:
    """Return the model, the number of cores, and the flags that choose kernels."""
    fields: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = [f for f in fields.get("Flags", "").split() if f.startswith(("avx", "amx", "fma"))]
    parts = [fields.get("Model name", "unknown"), f"{fields.get('CPU(s)', '?')} CPUs", *flags]
    return ", ".join(parts[:2]) + (f" ({' '.join(flags)})" if flags else "")
