"""Tokenizer of the small test model (seedling): a token per byte, and two whole-word tokens.

Any text can be encoded, since the alphabet consists of all 256 bytes. There is no BOS token.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
MAX_TOKENS = 4096

# Messages end with a line break, those of the assistant with END instead. A single user message is
# therefore identical to the bare prompt, which is the format of the training data.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '" + END + "' }}{% else %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
)


def build() -> PreTrainedTokenizerFast:
    """Builds the tokenizer of the small test model (seedling); the result is deterministic."""
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
