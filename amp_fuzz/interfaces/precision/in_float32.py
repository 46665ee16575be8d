# mypy: ignore-errors
"""The code that a report prints for a user to paste; the search for a remedy runs the same.

Everything from `run_in_float32` on is printed: it needs nothing but torch.
"""

__all__ = ["run_in_float32"]


def run_in_float32(model, names, device_type):
    """Run the own statements of some submodules with autocast off, in float32.

    Their other children run under autocast as before. Returns a function that undoes it.
    """
    import torch
    from torch.utils._pytree import tree_map

    outside = []  # for each exempt call that is under way, whether autocast is on around it

    def wide(tree):
        low = (torch.float16, torch.bfloat16)
        return tree_map(
            lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in low else x, tree
        )

    def wrap(module, off, child):
        forward = module.forward

        def run(*args, **kwargs):
            if not off and not outside:
                return forward(*args, **kwargs)
            enabled = torch.is_autocast_enabled(device_type)
            if child and outside:
                enabled = outside[-1]
            if off:
                outside.append(enabled)
                args, kwargs = wide(args), wide(kwargs)
            try:
                with torch.autocast(device_type, enabled=enabled and not off):
                    return wide(forward(*args, **kwargs))
            finally:
                if off:
                    outside.pop()

        wrapped.append((module, vars(module).get("forward")))
        module.forward = run

    wrapped, exempt, children = [], set(), set()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        parent = name
        while parent:  # lists and dictionaries of modules are not called
            parent = parent.rpartition(".")[0]
            if type(modules[parent]).forward is not torch.nn.Module.forward:
                break
        if name in names:
            exempt.add(module)
        if name and parent in names:
            children.add(module)
    for module in model.modules():
        if module in exempt or module in children:
            wrap(module, module in exempt, module in children)

    def undo():
        for module, before in wrapped:
            if before is None:
                del module.forward
            else:
                module.forward = before

    return undo
