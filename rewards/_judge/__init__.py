"""What rewards share that ask a vision-language model behind a server of the OpenAI kind."""
