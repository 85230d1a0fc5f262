/* Changed words: their distances from one another, and their zigzag differences, in one pass at the pace of memory. See changed_words.py. */

#include "_kernel.h"

#define LINE_BYTES 64
#define AHEAD 2048 /* bytes: the processor itself does not look beyond a page */

/* Adds a line to both sums, which the caller holds in registers; whether it differs. */
INLINE int add_line(const char *words, const char *base, Sum *of_words, Sum *of_base)
{
    Pair differ = {0, 0};
    for (size_t at = 0; at < LINE_BYTES; at += sizeof(Pair)) {
        Pair word, other;
        memcpy(&word, words + at, sizeof word);
        memcpy(&other, base + at, sizeof other);
        of_words->words += word;
        of_words->sums += of_words->words;
        of_base->words += other;
        of_base->sums += of_base->words;
        differ |= word ^ other;
    }
    return (differ[0] | differ[1]) != 0;
}

#define CHANGES(BITS)                                                                                                                      \
    static uint##BITS##_t signed_order##BITS(uint##BITS##_t word, int is_float)                                                            \
    {                                                                                                                                      \
        uint##BITS##_t negative = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                              \
        return word ^ (uint##BITS##_t)(is_float ? negative >> 1 : 0);                                                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    static void note##BITS(Search *search, size_t first, const char *words, const char *base)                                              \
    {                                                                                                                                      \
        for (size_t at = 0; at < LINE_BYTES / 8; at++) {                                                                                   \
            uint64_t some, other;                                                                                                          \
            memcpy(&some, words + at * 8, 8);                                                                                              \
            memcpy(&other, base + at * 8, 8);                                                                                              \
            for (uint64_t differ = some ^ other; differ;) {                                                                                \
                unsigned bit = (unsigned)TRAILING_ZEROS(differ) / BITS * BITS;                                                             \
                size_t word = first + at * (64 / BITS) + bit / BITS;                                                                       \
                differ &= ~((uint64_t)(uint##BITS##_t)-1 << bit);                                                                          \
                if (search->count++ >= search->limit)                                                                                      \
                    continue;                                                                                                              \
                uint##BITS##_t difference = (uint##BITS##_t)(signed_order##BITS((uint##BITS##_t)(some >> bit), search->is_float) -         \
                                                             signed_order##BITS((uint##BITS##_t)(other >> bit), search->is_float));        \
                uint##BITS##_t sign = (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                                    \
                uint32_t gap = (uint32_t)(word + 1 - search->next);                                                                        \
                memcpy(search->gaps + (search->count - 1) * 4, &gap, 4);                                                                   \
                store##BITS(search->values, search->count - 1, (uint##BITS##_t)(difference << 1) ^ sign);                                  \
                if (search->into)                                                                                                          \
                    store##BITS(search->into, word, (uint##BITS##_t)(some >> bit));                                                        \
                search->next = word + 1;                                                                                                   \
            }                                                                                                                              \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void find##BITS(Search *search, size_t at, size_t end)                                                                          \
    {                                                                                                                                      \
        Sum of_words = search->of_words, of_base = search->of_base;                                                                        \
        for (; at + LINE_BYTES <= end; at += LINE_BYTES) {                                                                                 \
            PREFETCH(search->words + at + AHEAD);                                                                                          \
            PREFETCH(search->base + at + AHEAD);                                                                                           \
            if (add_line(search->words + at, search->base + at, &of_words, &of_base) && search->count <= search->limit)                    \
                note##BITS(search, at / (BITS / 8), search->words + at, search->base + at);                                                \
        }                                                                                                                                  \
        if (at < end) {                                                                                                                    \
            char last[2][LINE_BYTES] = {{0}};                                                                                              \
            memcpy(last[0], search->words + at, end - at);                                                                                 \
            memcpy(last[1], search->base + at, end - at);                                                                                  \
            if (add_line(last[0], last[1], &of_words, &of_base) && search->count <= search->limit)                                         \
                note##BITS(search, at / (BITS / 8), last[0], last[1]);                                                                     \
        }                                                                                                                                  \
        search->of_words = of_words;                                                                                                       \
        search->of_base = of_base;                                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    static void apply##BITS(const char *gaps, const char *values, char *into, size_t count, int is_float)                                  \
    {                                                                                                                                      \
        size_t next = 0;                                                                                                                   \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            next += load32(gaps, i);                                                                                                       \
            uint##BITS##_t zigzag = load##BITS(values, i);                                                                                 \
            uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                              \
            uint##BITS##_t word = (uint##BITS##_t)(signed_order##BITS(load##BITS(into, next - 1), is_float) + difference);                 \
            store##BITS(into, next - 1, signed_order##BITS(word, is_float));                                                               \
        }                                                                                                                                  \
    }

CHANGES(8)
CHANGES(16)
CHANGES(32)
CHANGES(64)

const FindLoop find_loops[4] = {find8, find16, find32, find64};
const ApplyLoop apply_loops[4] = {apply8, apply16, apply32, apply64};

int gaps_fit(const char *gaps, size_t count, size_t words)
{
    size_t next = 0;
    for (size_t i = 0; i < count; i++) {
        if (!load32(gaps, i))
            return 0;
        next += load32(gaps, i);
    }
    return next <= words;
}
