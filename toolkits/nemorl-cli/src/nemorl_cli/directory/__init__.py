"""The directory of plugins: what there is besides what is installed here.

An *index* is a static JSON file with one *listing* per distribution. ``listing`` says what stands in it, ``indexes``
where indexes are and which are believed, ``search`` finds plugins in them, ``badges`` turns what `nemorl plugins check`
saw into a listing and a badge, ``publishing`` builds and signs an index, ``page`` shows one as Markdown. Nothing of an
index is ever run or installed by looking at it.
"""
