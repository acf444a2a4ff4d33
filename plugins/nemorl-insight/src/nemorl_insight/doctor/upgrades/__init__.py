"""``nemorl try``: other versions of a package tried beside the installed ones, which stay as they are.

:mod:`resolving` asks pip what a version changes, :mod:`overlays` makes an environment of it on top of the present one,
:mod:`touching` finds the plugins that use the package, :mod:`trials` runs what there is to run, :mod:`steps` makes a
recorded step again on both sides and compares it, and :mod:`bounds` says what the outcome means for requirements.
"""
