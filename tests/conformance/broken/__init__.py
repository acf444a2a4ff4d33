"""A package of plugins with one deliberate mistake each: what the conformance kit has to notice.

``mutants`` beside it says which check each has to fail. Modules of configs import nothing heavy, as plugins must.
"""
