"""The environment ``retriever``: the policy searches a corpus of the user's, reads what is found, and answers.

``config``: its options. ``corpus``: reading documents, and finding them with BM25. ``environment``: the conversation.
"""
