"""The environment ``judge``: a language model grades each response.

``config``: its options. ``questions``: what the judge is asked, and how its verdict is read. ``client``: asking a
server, with retries and a deadline. ``cache``: verdicts kept on disk. ``environment``: verdicts as scores.
"""
