"""Weights in fewer bits: round-to-nearest with error-minimising scales, GPTQ, and the outlier guard."""
