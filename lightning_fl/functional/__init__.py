"""Pure functions of tensors that implement the equations of the papers."""
