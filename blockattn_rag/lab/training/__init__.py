"""Block fine-tuning: data, masks, and training of models for block and full mode."""
