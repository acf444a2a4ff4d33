"""The memory that a run takes of its devices, in closed form: plain numbers, without torch and without weights.

A backend describes itself (``describing``: how it spreads a model, what it keeps, which layouts it has); ``reading``
makes a scene of a run's config, ``budgets`` says what each phase of a step takes of the fullest device, ``layouts``
what else could be chosen. ``nemorl plan`` adds seconds; the resources of a run hold their tenants to the budgets.
"""
