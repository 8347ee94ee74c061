// An image, shown as it is; small ones enlarged without smoothing, so that their pixels can be seen.
import { useMediaUrl, mediaFacts, type MediaProperties } from "./source";
import { SeenByModel } from "./seen";
import { Notice } from "../ui/parts";

const SMALL = 160; // pixels of a side under which an image is enlarged

export function Picture({ run, sha256, entry }: MediaProperties) {
  const { url, error } = useMediaUrl(entry.url);
  const small = (entry.width ?? SMALL) < SMALL && (entry.height ?? SMALL) < SMALL;
  return (
    <figure class="medium image">
      {error && <Notice kind="problem">The image cannot be read: {error.message}</Notice>}
      {url && <img src={url} class={small ? "pixels" : ""} loading="lazy" alt={`Image ${sha256.slice(0, 8)} of the observation`} width={entry.width ?? undefined} height={entry.height ?? undefined} />}
      <figcaption class="muted">{mediaFacts(entry)}</figcaption>
      <SeenByModel run={run} sha256={sha256} kind="image" />
    </figure>
  );
}
