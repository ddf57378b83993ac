"""Which platform a program is being traced for. Imports jax only."""

from __future__ import annotations

import jax


def platform() -> str:
    """Platform that is being traced for: the default device's, else the default backend's.

    `jax.default_device(device)` with a device of an ahead-of-time topology makes everything traced and described inside
    fit that device, though no such backend exists here.
    """
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform
