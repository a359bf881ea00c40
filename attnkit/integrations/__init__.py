"""attnkit inside models that others wrote: Hugging Face's, and all that call PyTorch's SDPA.

Importing these modules changes nothing; `huggingface.register` and `torch.override_sdpa` do.
"""
