"""A server of the Tinker API: clients written for it train and sample on this machine.

``models``: what trains and samples, as a protocol; ``wire``: requests and answers as bytes and as plain data;
``journal``: what a killed server comes back with; ``order``: which request of a model may run; ``futures``: who waits
for an answer; ``work``: the thread that runs requests, and ``execution``: what each kind of them does; ``app`` and the
``routes_*`` modules: HTTP; ``server``: all of it on a thread of its own, as ``nemorl serve --tinker`` runs it.
``losses`` and ``batches`` turn a client's data into a loss of ours and its batch; ``trained`` and ``snapshots`` train
and sample with our engines; ``flight`` keeps each client's loop as a run.
"""
