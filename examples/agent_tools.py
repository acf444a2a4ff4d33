"""Tools and a reward for examples/grpo_agent_tools.yaml."""


def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def correct(prompt: str, response: str, answer: str) -> float:
    """1 when the answer stands at the end of what the policy says last."""
    return float(response.strip().rstrip(".").endswith(answer))
