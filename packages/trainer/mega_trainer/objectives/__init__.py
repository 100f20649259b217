"""Training objectives other than the mean cross entropy of next tokens: preference losses, reward models, distillation."""
