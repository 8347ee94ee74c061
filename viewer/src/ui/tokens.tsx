// The token strip: each token a cell with its text, coloured by a chosen quantity; the same as a table for those who read or cannot see colours.
import { useMemo, useRef, useState } from "preact/hooks";
import { cells, has, MEANINGS, QUANTITIES, scale, shade, shown, valueOf, type Cell, type Quantity } from "../data/tokens";
import type { TokenSample } from "../data/types";
import { count, DASH, fixed, number, plural } from "./format";
import { Choice } from "./parts";

const FIRST = 1500; // cells drawn until asked for more

interface Properties {
  samples: TokenSample[];
  quantity: Quantity;
  onQuantity: (quantity: Quantity) => void;
  why: string[];
}

export function Tokens(properties: Properties) {
  const { samples, quantity } = properties;
  const offered = QUANTITIES.filter(([name]) => samples.some((sample) => has(sample, name)));
  const used = offered.some(([name]) => name === quantity) ? quantity : "mask";
  return (
    <>
      <div class="token-bar">
        <Choice label="Colour tokens by" options={offered} value={used} onChoose={properties.onQuantity} />
        <span class="muted">{MEANINGS[used]}</span>
      </div>
      {samples.map((sample, index) => (
        <Strip key={index} sample={sample} why={properties.why} quantity={used} title={samples.length > 1 ? `Sequence ${index + 1} of ${samples.length}` : "Tokens"} />
      ))}
      {properties.why.length > 0 && (
        <details class="why">
          <summary>Why each part is trained on or not</summary>
          <ul>
            {properties.why.map((text) => (
              <li key={text}>{text}</li>
            ))}
          </ul>
        </details>
      )}
    </>
  );
}

function Strip(properties: { sample: TokenSample; why: string[]; quantity: Quantity; title: string }) {
  const { sample, why, quantity, title } = properties;
  const all = useMemo(() => cells(sample), [sample]);
  const range = useMemo(() => scale(sample, quantity), [sample, quantity]);
  const [at, setAt] = useState<number | null>(null);
  const [limit, setLimit] = useState(FIRST);
  const strip = useRef<HTMLDivElement>(null);
  const trained = sample.mask.reduce((sum, mask) => sum + mask, 0);
  const move = (by: number) => {
    const next = Math.min(all.length - 1, Math.max(0, (at ?? -1) + by));
    if (next >= limit) setLimit(next + FIRST);
    setAt(next);
    strip.current?.children[next]?.scrollIntoView({ block: "nearest" });
  };
  const keys: Record<string, () => void> = { ArrowRight: () => move(1), ArrowLeft: () => move(-1), Home: () => move(-all.length), End: () => move(all.length), Escape: () => setAt(null) };
  const cell = at === null ? null : all[at];
  return (
    <div class="strip-box">
      <p class="muted strip-count">
        {title}: {plural(sample.ids.length, "token")}, {count(trained)} produced by the policy{quantity !== "mask" && range[1] > range[0] ? `; ${quantity} from ${number(range[0])} to ${number(range[1])}` : ""}
      </p>
      <div
        class="strip"
        ref={strip}
        tabIndex={0}
        role="group"
        aria-label={`${title}, arrow keys go through them`}
        data-keys="own"
        onKeyDown={(event) => {
          const action = keys[event.key];
          if (action) (event.preventDefault(), action());
        }}
        onMouseOver={(event) => {
          const place = (event.target as HTMLElement).dataset.at;
          if (place !== undefined) setAt(Number(place));
        }}
      >
        <Cells all={all} limit={limit} sample={sample} quantity={quantity} range={range} />
      </div>
      <p class="inspector" aria-live="polite">
        {cell ? <Inspected sample={sample} cell={cell} why={why} /> : <span class="muted">Point at a token, or use the arrow keys.</span>}
      </p>
      {all.length > limit && (
        <button type="button" onClick={() => setLimit(all.length)}>
          Show all {count(all.length)} cells
        </button>
      )}
      <TokenTable sample={sample} all={all} />
    </div>
  );
}

function Cells(properties: { all: Cell[]; limit: number; sample: TokenSample; quantity: Quantity; range: [number, number] }) {
  const { all, limit, sample, quantity, range } = properties;
  return useMemo(
    () => (
      <>
        {all.slice(0, limit).map((cell, place) => {
          const colour = shade(quantity, valueOf(sample, quantity, cell.start), range);
          const trained = sample.mask[cell.start] === 1;
          return (
            <span
              key={cell.start}
              data-at={place}
              class={`token ${trained ? "trained" : "given"} ${colour ? colour.hue : ""} ${cell.length > 1 ? "folded" : ""} ${cell.text.endsWith("\n") ? "line" : ""}`}
              style={colour ? `--strength: ${Math.round(colour.strength * 100)}%` : undefined}
            >
              {shown(cell.text)}
              {cell.length > 1 && <b> × {count(cell.length)}</b>}
            </span>
          );
        })}
      </>
    ),
    [all, limit, sample, quantity, range],
  );
}

function Inspected({ sample, cell, why }: { sample: TokenSample; cell: Cell; why: string[] }) {
  const at = cell.start;
  const values = QUANTITIES.filter(([name]) => name !== "mask").flatMap(([name, title]) => {
    const value = valueOf(sample, name, at);
    return value === null ? [] : [`${title.toLowerCase()} ${name === "version" ? value : fixed(value, 4)}`];
  });
  return (
    <>
      <code>{shown(cell.text)}</code> {cell.length > 1 ? `${count(cell.length)} tokens, ` : ""}token {at}, id {sample.ids[at]}
      {sample.turn[at] !== undefined && sample.turn[at]! >= 0 ? `, turn ${sample.turn[at]}` : ""}
      {" · "}
      {why[sample.why?.[at] ?? -1] ?? (sample.mask[at] ? "produced by the policy" : "given, so masked")}
      {values.length > 0 && ` · ${values.join(" · ")}`}
    </>
  );
}

function TokenTable({ sample, all }: { sample: TokenSample; all: Cell[] }) {
  const [open, setOpen] = useState(false);
  const [limit, setLimit] = useState(200);
  const columns = QUANTITIES.filter(([name]) => name !== "mask" && has(sample, name));
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>The same as a table</summary>
      {open && (
        <div class="scroll tokens-table" role="region" aria-label="Table of tokens" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th scope="col" class="right">
                  Position
                </th>
                <th scope="col">Text</th>
                <th scope="col" class="right">
                  Id
                </th>
                <th scope="col">Mask</th>
                {columns.map(([name, title]) => (
                  <th key={name} scope="col" class="right">
                    {title}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {all.slice(0, limit).map((cell) => (
                <tr key={cell.start}>
                  <td class="right">{cell.length > 1 ? `${cell.start}–${cell.start + cell.length - 1}` : cell.start}</td>
                  <th scope="row">
                    <code>{shown(cell.text)}</code>
                  </th>
                  <td class="right">{sample.ids[cell.start]}</td>
                  <td>{sample.mask[cell.start]}</td>
                  {columns.map(([name]) => {
                    const value = valueOf(sample, name, cell.start);
                    return (
                      <td key={name} class="right">
                        {value === null ? DASH : name === "version" ? value : fixed(value, 4)}
                      </td>
                    );
                  })}
                </tr>
              ))}
            </tbody>
          </table>
          {all.length > limit && (
            <button type="button" onClick={() => setLimit(limit + 1000)}>
              More rows
            </button>
          )}
        </div>
      )}
    </details>
  );
}
