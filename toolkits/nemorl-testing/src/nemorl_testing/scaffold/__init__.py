"""``nemorl plugins new``: a complete plugin package of any kind, to start from.

``packages`` holds one working package per kind, called ``nemorl-example``; ``names`` says what becomes of that name,
``writing`` writes the result, ``command`` is what people see.
"""
