"""The shared suite: what every backend and the runtime must hold, clause by clause, as tests.

``pytest --pyargs forebay.specs.suite --backend NAME[:MODE]`` or ``forebay conform NAME[:MODE]`` judges a backend. The tests reach the
device through :class:`forebay.specs.Backend` alone; there is nothing to subclass and nothing to override.
"""
