"""Seeded faults: small patches of a correct backend or of the runtime, each of which the shared suite has to catch (clause G1).

``forebay faults`` seeds them one by one and runs the suite's tests of the clause each breaks. A fault is data, in the TOML files here.
"""
