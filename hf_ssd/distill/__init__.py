"""`hf-ssd distill`: makes an assistant for any target by knowledge distillation."""
