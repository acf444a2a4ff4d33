"""The command ``nemorl plan``: what a run takes of each device, how long a step lasts, and which layout is best."""
