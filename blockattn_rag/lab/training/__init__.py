"""Block fine-tuning: data, masks, and training of models that answer in block and full mode."""
