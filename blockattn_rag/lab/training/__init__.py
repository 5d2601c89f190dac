"""Block fine-tuning: data, masks, and training of a model that answers in block and full mode."""
