// Text search over a run's episodes: the server's, or over the bundle's texts.
import { isBundle, read, runPath } from "./client";

interface Texts {
  seq: number[];
  text: string[];
}

const bundled = new Map<string, Promise<Texts>>();

/** Seqs of the episodes whose texts contain `text`, in any case. */
export async function searchTexts(run: string, text: string, signal?: AbortSignal): Promise<Set<number>> {
  if (!isBundle()) {
    const { seqs } = await read<{ seqs: number[] }>(`${runPath(run)}/search.json`, { q: text }, signal);
    return new Set(seqs);
  }
  let texts = bundled.get(run);
  if (!texts) bundled.set(run, (texts = read<Texts>(`${runPath(run)}/texts.json`)));
  const { seq, text: all } = await texts;
  const wanted = text.toLowerCase();
  return new Set(seq.filter((_, index) => all[index]!.toLowerCase().includes(wanted)));
}
