"""What hooks of a module or of a callback do to a step, for tests of what they carry over."""


def multiplied(module, by):
    """Multiply the parameters of a module."""
    for param in module.parameters():
        param.data.mul_(by)


def scaled_gradients(module, by):
    """Multiply the gradients of a module."""
    for param in module.parameters():
        param.grad.mul_(by)
