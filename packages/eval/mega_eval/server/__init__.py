"""OpenAI-compatible server for one model, for evaluation and experiments: FastAPI and uvicorn around the inference
engine.
"""
