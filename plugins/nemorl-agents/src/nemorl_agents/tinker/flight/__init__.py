"""The flight recorder: each client's loop is a run of nemorl, and can be made again without the client.

``observing``: what a server tells of its requests; ``operations``: those of each step in the order in which they ran,
as files; ``config``: what the run directory says of the loop; ``learned``: metrics and records of a step;
``logbook``: the run directory of one loop; ``loop``: what came since its last step; ``recorder``: the loops of a
server; ``repeating`` and ``trainer``: one made again from its files.
"""
