"""Parts that several algorithms share: targets, optimizers, inputs, exploration, options."""
