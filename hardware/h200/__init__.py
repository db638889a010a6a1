"""One prepared check of the ``cuda`` backend on a machine with an H200: suite, tokens, seeded faults, memory checker, rates."""
