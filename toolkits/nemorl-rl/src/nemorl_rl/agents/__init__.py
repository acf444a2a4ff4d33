"""Episodes that an environment drives: it calls the policy when it likes, and what was answered is what is trained.

``contract``: what an environment is given; ``record``: calls as token sequences; ``policy``: one episode's view of the
generator; ``driver``: many episodes at once; ``watched``, ``outcomes``: what became of an episode, and its score;
``turns``: conversations as such episodes; ``seats``: several roles; ``gateways``: over HTTP; ``trial``: before the run.
Messages become tokens, and back, in ``nemorl_rl.chat``.
"""
