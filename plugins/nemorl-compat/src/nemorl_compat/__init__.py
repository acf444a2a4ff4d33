"""Migration of old code and configs to nemorl: the import name ``nemo_rl``, adapters of shapes, YAML migration.

``names`` is the table of old and new names, ``importing`` makes modules of it. Where the new API has another shape an
adapter stands between: ``trainers``, ``environments``, ``policies``, ``scripts``. ``legacy_yaml`` reads old configs and
``migration`` translates them.
"""
