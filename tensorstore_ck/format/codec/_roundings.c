/* fp32 numbers rounded to bfloat16: to nearest, ties to even, every NaN to 7FC0. See cast.py. */

#include "_kernel.h"

#define PIECE ((size_t)4096) /* words */

HOT static void round_piece(const char *restrict masters, size_t count, char *restrict into)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t word = load32(masters, i), high = (word + 0x7FFF + (word >> 16 & 1)) >> 16;
        store16(into, i, (uint16_t)((word & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : high));
    }
}

void round_words(const char *masters, size_t count, char *into)
{
    round_piece(masters, count, into);
}

int are_roundings(const char *masters, size_t count, const char *words)
{
    char piece[2 * PIECE];
    for (size_t at = 0, here; at < count; at += here) {
        here = count - at < PIECE ? count - at : PIECE;
        round_piece(masters + 4 * at, here, piece);
        if (memcmp(piece, words + 2 * at, 2 * here))
            return 0;
    }
    return 1;
}
