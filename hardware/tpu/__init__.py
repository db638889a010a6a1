"""One prepared check of the ``cuda`` backend on a machine with a TPU: suite, tokens, seeded faults, memory checker, rates."""
