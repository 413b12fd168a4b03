"""The tool that the model may call."""


def calculator(expression: str) -> int:
    """Multiplies two whole numbers.

    Args:
        expression: two numbers with * between them, such as 12*34
    """
    left, right = expression.split("*")
    return int(left) * int(right)


tools = [calculator]
