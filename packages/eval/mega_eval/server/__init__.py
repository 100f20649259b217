"""An OpenAI-compatible server for one model, for evaluation and for trying it: FastAPI and uvicorn around the engine."""
