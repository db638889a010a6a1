"""JAX on the host's own processor, where Pallas interprets."""

from __future__ import annotations

import jax

jax.config.update("jax_platforms", "cpu")
