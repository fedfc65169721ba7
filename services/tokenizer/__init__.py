"""The tokenizer process: text and chats to token ids, and back."""
