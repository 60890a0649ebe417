"""Fine-tuning with LoRA over a slow link."""
