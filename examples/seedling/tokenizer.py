"""The seedling's tokenizer: every byte is a token, and the task's two words are one token each.

Any text encodes, because the 256 bytes are the alphabet. No token marks the beginning of a text.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
MAX_TOKENS = 4096

# A message ends with its line, an assistant's with END instead. A single user message is therefore
# the same text as the bare prompt, which is what the model was trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '" + END + "' }}{% else %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
)


def build() -> PreTrainedTokenizerFast:
    """Builds the tokenizer; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["Compute", "answer"], _trainer())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def _trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=512,  # an upper bound: merging stops when both words are whole
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
