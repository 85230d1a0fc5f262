/* Writes blocks of zstd frames that are a Huffman code and nothing else: RFC 8878, 3.1.1.3.1 and 4.2. Any zstd library reads them.

   zstd itself, without a search for matches worth the name, takes twice as long: it cannot be told to leave the search out. */

#include "_kernel.h"

#define LEAST 512 /* bytes; fewer are stored as they are */
#define LITERALS_HEADER 5

/* In turns, as neighbours are often alike, and a count waits for the one before. */
HOT static void count_streams(const uint8_t *raw, const size_t counts[STREAMS], uint32_t occurrences[STREAMS][256])
{
    const uint8_t *from[STREAMS];
    size_t least = counts[STREAMS - 1], i = 0;
    memset(occurrences, 0, STREAMS * sizeof *occurrences);
    for (int s = 0; s < STREAMS; raw += counts[s++])
        from[s] = raw;
    for (; i + 8 <= least; i += 8) {
        uint64_t heads[STREAMS];
        for (int s = 0; s < STREAMS; s++)
            memcpy(&heads[s], from[s] + i, 8);
        for (int shift = 0; shift < 64; shift += 8)
            for (int s = 0; s < STREAMS; s++)
                occurrences[s][heads[s] >> shift & 255]++;
    }
    for (int s = 0; s < STREAMS; s++)
        for (size_t rest = i; rest < counts[s]; rest++)
            occurrences[s][from[s][rest]]++;
}

/* How often each byte occurs in each of the streams, whose sizes become `counts`, and in all of them. */
static void count_bytes(const uint8_t *raw, size_t size, size_t counts[STREAMS], uint32_t occurrences[STREAMS][256], uint32_t all[256])
{
    size_t quarter = (size + STREAMS - 1) / STREAMS, left = size;
    for (int s = 0; s < STREAMS; left -= counts[s++])
        counts[s] = left < quarter ? left : quarter;
    count_streams(raw, counts, occurrences);
    for (int symbol = 0; symbol < 256; symbol++)
        all[symbol] = occurrences[0][symbol] + occurrences[1][symbol] + occurrences[2][symbol] + occurrences[3][symbol];
}

/* Code words at the top of a word, their lengths in its lowest byte. */
static void make_words(const uint8_t lengths[256], unsigned longest, uint64_t words[256])
{
    uint64_t code = 0;
    for (unsigned bits = longest; bits > 0; bits--, code >>= 1)
        for (int symbol = 0; symbol < 256; symbol++)
            if (lengths[symbol] == bits)
                words[symbol] = code++ << (64 - bits) | bits;
}

typedef struct {
    uint64_t bits; /* the last `count` ones, at the top; below them is what is to be ignored */
    unsigned count;
    const uint8_t *from; /* the end of what is not encoded yet: a decoder begins where an encoder ends */
    uint8_t *to;
} Stream;

#define PUT(STREAM, WORD)                                                                                                                  \
    STREAM.bits = STREAM.bits >> ((WORD) & 63) | (WORD);                                                                                   \
    STREAM.count += (unsigned)(WORD) & 255

/* The first four leave lengths below the bits, which are pushed out; the fifth one's would be among them. 7 + 5 * 11 bits fit. */
#define PUT_FIVE(STREAM)                                                                                                                   \
    do {                                                                                                                                   \
        uint64_t last = words[STREAM.from[-5]], full;                                                                                      \
        PUT(STREAM, words[STREAM.from[-1]]);                                                                                               \
        PUT(STREAM, words[STREAM.from[-2]]);                                                                                               \
        PUT(STREAM, words[STREAM.from[-3]]);                                                                                               \
        PUT(STREAM, words[STREAM.from[-4]]);                                                                                               \
        STREAM.bits = STREAM.bits >> (last & 63) | (last & ~(uint64_t)255);                                                                \
        STREAM.count += (unsigned)last & 255;                                                                                              \
        STREAM.from -= 5;                                                                                                                  \
        full = STREAM.bits >> (64 - STREAM.count);                                                                                         \
        memcpy(STREAM.to, &full, 8);                                                                                                       \
        STREAM.to += STREAM.count >> 3;                                                                                                    \
        STREAM.count &= 7;                                                                                                                 \
    } while (0)

/* Two streams at a time, as each symbol waits for the one before. Writes up to 8 bytes more than it must. */
HOT_SHIFTS static void put_fives(Stream streams[2], size_t fives, const uint64_t words[256])
{
    Stream one = streams[0], other = streams[1];
    for (; fives > 0; fives--) {
        PUT_FIVE(one);
        PUT_FIVE(other);
    }
    streams[0] = one;
    streams[1] = other;
}

/* Writes no byte too many. */
static void put_singly(Stream *stream, size_t count, const uint64_t words[256])
{
    for (; count > 0; count--) {
        uint64_t word = words[*--stream->from];
        stream->bits = stream->bits >> (word & 63) | (word & ~(uint64_t)255);
        for (stream->count += (unsigned)word & 255; stream->count >= 8; stream->count -= 8)
            *stream->to++ = (uint8_t)(stream->bits >> (64 - stream->count));
    }
}

static void end_stream(Stream *stream)
{
    uint64_t rest = stream->count ? stream->bits >> (64 - stream->count) : 0;
    *stream->to++ = (uint8_t)(rest | (uint64_t)1 << stream->count);
}

#define SINGLY 64 /* symbols at the end of a stream, which take 8 bytes or more: the stream behind it is not overwritten */

static void encode_streams(const uint8_t *raw, const size_t counts[STREAMS], const size_t sizes[STREAMS], const uint64_t words[256],
                           uint8_t *to)
{
    size_t fives = (counts[STREAMS - 1] - SINGLY) / 5;
    Stream streams[STREAMS];
    for (int s = 0; s < STREAMS; s++) {
        raw += counts[s];
        streams[s] = (Stream){0, 0, raw, to};
        to += sizes[s];
        put_singly(&streams[s], counts[s] - SINGLY - 5 * fives, words);
    }
    for (int s = 0; s < STREAMS; s += 2)
        put_fives(streams + s, fives, words);
    for (int s = 0; s < STREAMS; s++) {
        put_singly(&streams[s], SINGLY, words);
        end_stream(&streams[s]);
    }
}

static void put_le(uint8_t *to, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        to[i] = (uint8_t)(value >> 8 * i);
}

enum { RAW_BLOCK, RLE_BLOCK, COMPRESSED_BLOCK };

static size_t put_block_header(uint8_t *to, int type, size_t size, int is_last)
{
    put_le(to, size << 3 | (unsigned)type << 1 | (unsigned)is_last, BLOCK_HEADER);
    return BLOCK_HEADER;
}

/* The block's content; 0 if it is not clearly smaller than `size`. */
static size_t compress_block(const uint8_t *raw, size_t size, const size_t counts[STREAMS], uint32_t (*occurrences)[256],
                             const uint32_t all[256], uint8_t *to)
{
    uint8_t lengths[256], description[136];
    unsigned longest = choose_lengths(all, lengths);
    size_t described = describe_code(lengths, longest, description), sizes[STREAMS], coded = described + 2 * (STREAMS - 1);
    for (int s = 0; s < STREAMS; s++) {
        size_t bits = 1;
        for (int symbol = 0; symbol < 256; symbol++)
            bits += (size_t)occurrences[s][symbol] * lengths[symbol];
        coded += sizes[s] = (bits + 7) / 8;
    }
    if (!described || LITERALS_HEADER + coded + 1 > size - size / 64)
        return 0;
    put_le(to, 2 | 3 << 2 | (uint64_t)size << 4 | (uint64_t)coded << 22, LITERALS_HEADER);
    memcpy(to + LITERALS_HEADER, description, described);
    uint8_t *at = to + LITERALS_HEADER + described;
    for (int s = 0; s < STREAMS - 1; s++, at += 2)
        put_le(at, sizes[s], 2);
    uint64_t words[256];
    make_words(lengths, longest, words);
    encode_streams(raw, counts, sizes, words, at);
    to[LITERALS_HEADER + coded] = 0; /* no matches */
    return LITERALS_HEADER + coded + 1;
}

size_t encode_huffman_block(const uint8_t *raw, size_t size, int is_last, uint8_t *to)
{
    if (size >= LEAST) {
        uint32_t occurrences[STREAMS][256], all[256];
        size_t counts[STREAMS], coded;
        count_bytes(raw, size, counts, occurrences, all);
        if (all[raw[0]] == size) {
            put_block_header(to, RLE_BLOCK, size, is_last);
            to[BLOCK_HEADER] = raw[0];
            return BLOCK_HEADER + 1;
        }
        coded = compress_block(raw, size, counts, occurrences, all, to + BLOCK_HEADER);
        if (coded) {
            put_block_header(to, COMPRESSED_BLOCK, coded, is_last);
            return BLOCK_HEADER + coded;
        }
    }
    put_block_header(to, RAW_BLOCK, size, is_last);
    memcpy(to + BLOCK_HEADER, raw, size);
    return BLOCK_HEADER + size;
}

/* With a window of HUFFMAN_BLOCK, and the size in 4 bytes. */
size_t encode_frame_header(size_t size, uint8_t *to)
{
    put_le(to, 0xFD2FB528, 4);
    to[4] = 0x80;
    to[5] = (17 - 10) << 3;
    put_le(to + 6, size, 4);
    return FRAME_HEADER;
}
