"""``nemorl doctor``: what this machine has, what is known to go wrong with it, and whether two engines agree.

``command`` is what people type, ``examination`` what they see, with the list of checks; the other modules hold the
facts and the checks. What is wrong is decided from metadata and files; nothing that is looked at is imported.
``runs`` is ``nemorl runs verify``, which does the same for what runs left behind.
"""
